"""Fits that come with akjax, by name: cost models of engines whose step times are public."""

from importlib import resources

from akjax.fit_file import FitFile, decoded_fit

# The folder beside this file; `scripts/make_presets` writes it, and each file says where its figures come from.
_FOLDER = "preset_fits"
_ENDING = ".json"


def preset_names() -> tuple[str, ...]:
    """The names that there are, in order."""
    files = (resources.files("akjax") / _FOLDER).iterdir()
    return tuple(sorted(file.name.removesuffix(_ENDING) for file in files if file.name.endswith(_ENDING)))


def preset(name: str) -> FitFile:
    """A fit by its name.

    Raises:
        ValueError: there is none of that name; the message says which there are.
    """
    names = preset_names()
    if name not in names:
        raise ValueError(
            f"there is no fit named {name!r}: there are {', '.join(names)}, and the path of a file of your own works"
            " too"
        )
    file = resources.files("akjax") / _FOLDER / (name + _ENDING)
    return decoded_fit(file.read_bytes(), name)
