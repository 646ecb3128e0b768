"""The matrices that come with the repository: what needs them needs no ergo."""

from pathlib import Path

from models.errors import UserError
from models.water.matrices import read

FOLDER = Path(__file__).resolve().parents[2] / "data" / "ergo"
FILES = {  # by name
    "default": "waters_36_6-31g.npz",
    "ten waters": "waters_10_6-31g.npz",
    "water STO-3G": "waters_1_sto-3g.npz",
    "water 6-31G": "waters_1_6-31g.npz",
    "water 6-31G**": "waters_1_6-31gss.npz",
    "pair 6-31G**": "waters_2_6-31gss.npz",  # S and H_core alone
}


def load(name="default"):
    """The ErgoMatrices of an embedded cluster.

    Args:
        name: a name of FILES.

    Raises:
        UserError: another name; or the file is missing or damaged.
    """
    if name not in FILES:
        raise UserError(f"expected embedded matrices: {', '.join(FILES)}; got {name}")
    return read(FOLDER / FILES[name])
