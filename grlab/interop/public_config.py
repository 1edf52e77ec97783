"""The config.json of a public checkpoint: its fields, each checked when it is asked for."""

import sys
from collections.abc import Mapping, Sequence

from grlab.errors import UsageError, unknown
from grlab.interop.tensors import TensorFolder

_KINDS = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "an object"}


class PublicConfig:
    """The fields of the text model; `defaults` stand in for those that are not there."""

    def __init__(self, folder: TensorFolder, model_types: Sequence[str], defaults: Mapping[str, object] | None = None):
        """Raises UsageError for a model of none of `model_types`."""
        self.file = str(folder.path / "config.json")
        text = folder.config.get("text_config", folder.config)
        if not isinstance(text, dict):
            raise self.error("text_config", text, "must be an object")
        self.fields = {**(defaults or {}), **text}
        if self.fields.get("model_type") not in model_types:
            raise unknown(f"{self.file}: model_type", self.fields.get("model_type"), model_types)

    def get(self, name: str, kind: type, above: float | None = None, default: object = None):
        """The field, a dot before each name inside a group; UsageError where it is missing or not of `kind`."""
        value = self.fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        value = default if value is None else value
        if value is None:
            raise self.error(name, None, "is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            raise self.error(name, value, f"must be {_KINDS[kind]}")
        if kind is float:
            if not abs(value) <= sys.float_info.max:
                raise self.error(name, value, "must be finite")
            value = float(value)
        if above is not None and not value > above:
            raise self.error(name, value, f"must be above {above}")
        return value

    def error(self, name: str, value: object, remedy: str) -> UsageError:
        return UsageError(name, value, f"{remedy} in {self.file}")
