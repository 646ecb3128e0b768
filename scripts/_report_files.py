"""Results as files: the same data for machines and readers, and a picture."""

import json

from models.files import write_atomically


def write_results(folder, name, *, data, markdown, picture=None):
    """Writes name.json, name.md and, where there is one, name.png, each in full or not at all.

    Args:
        folder: pathlib.Path.
        data: what json can hold. markdown: str. picture: bytes of a PNG.

    Returns:
        The paths written.

    Raises:
        StudyError: a file cannot be written.
    """
    contents = {"json": (json.dumps(data, indent=1) + "\n").encode(), "md": markdown.encode()}
    if picture is not None:
        contents["png"] = picture
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in contents}
    for suffix, content in contents.items():
        write_atomically(paths[suffix], lambda file, content=content: file.write(content))
    return list(paths.values())
