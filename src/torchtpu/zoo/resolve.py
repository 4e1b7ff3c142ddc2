"""From what the user wrote to a model's source."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any

from torchtpu.zoo.diffusion import DiffusersSource
from torchtpu.zoo.factory import FactorySource
from torchtpu.zoo.pretrained import TransformersSource
from torchtpu.zoo.source import ModelError, ModelSource, Published

__all__ = ["names", "resolve"]

_DATA = Path(__file__).with_name("data")


@functools.cache
def names() -> tuple[str, ...]:
    """The zoo's models, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def resolve(text: str) -> ModelSource:
    """The source of a model.

    Args:
        text: ``module:factory``, looked up as ``python -m`` would; a folder with a Transformers or Diffusers
            ``config.json``, or that file; or a name of the zoo.

    Raises:
        ModelError: there is no such model; the message names what there is.
    """
    path = Path(text).expanduser()
    if path.is_dir() or path.name == "config.json":
        return _from_file(text, path / "config.json" if path.is_dir() else path)
    if ":" in text:
        return FactorySource(text)
    name = text.lower()
    if name in names():
        entry = json.loads((_DATA / f"{name}.json").read_text())
        return _from_config(name, entry["config"], Published(**entry["published"]), entry.get("tiny"))
    raise ModelError(_unknown(text))


def _from_file(text: str, path: Path) -> ModelSource:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{text} has no config.json that can be read ({error.strerror}: {path})") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    return _from_config(text, config, None, None)


def _from_config(
    name: str, config: dict[str, Any], published: Published | None, tiny: dict[str, Any] | None
) -> ModelSource:
    kind = DiffusersSource if "_class_name" in config else TransformersSource
    return kind(name, config, published, tiny)


def _unknown(text: str) -> str:
    if "/" in text:
        what = f"{text} is not a folder; nothing is downloaded, so give the folder that holds the model's config.json"
    else:
        what = f"no model is called {text!r}"
        close = difflib.get_close_matches(text.lower(), names(), n=1)
        if close:
            what += f"; did you mean {close[0]}?"
    return f"{what} (the zoo has {', '.join(names())}; otherwise module:factory, or a folder with a config.json)"
