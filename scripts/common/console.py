"""The end of a script: its exit code, and one line where something is wrong."""

import os
import sys

from models.files import UserError


def exit_code(main):
    """Runs ``main()``: 0; 1 with one line if input or output is bad; 130 if it is interrupted."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # what does not fit must be known here, not at the interpreter's end
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # Else the interpreter's end would fail to write again what stdout still holds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: files that are written are whole", file=sys.stderr)
        return 130
    return 0
