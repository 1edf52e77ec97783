"""Datasets of TFDS: where they are kept, how they are prepared and read, without TensorFlow where TFDS allows."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow_datasets as tfds

from grlab.data.text_files import quiet
from grlab.errors import UsageError, first_line, nearest, unknown


def root(data_dir: str | None) -> Path:
    """The folder of prepared datasets and tokens that `config.data.dir` names."""
    if data_dir:
        return Path(data_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grlab"


def builder(name: str, root: Path, *, field: str, others: Sequence[str] = ()) -> tfds.core.DatasetBuilder:
    """The builder of the TFDS dataset `name`, prepared under `root`.

    Raises UsageError of `field` for a name that neither TFDS nor `others` has, and where it cannot be prepared.
    """
    # TFDS registers its older modules in one go and gives up at the first that does not import without TensorFlow;
    # that of the text datasets does import.
    import tensorflow_datasets.text  # noqa: F401

    with quiet():
        try:
            builder = tfds.builder(name, data_dir=root)
        except tfds.core.registered.DatasetNotFoundError:
            names = [*others, *tfds.list_builders(with_community_datasets=False)]  # those need the network
            hint = nearest(name.split("/")[0], names)
            known = [*others, f"what is prepared in {root}", "the names of TFDS"]
            raise UsageError(field, name, f"{hint}known: {', '.join(known)}") from None
        except Exception as e:  # whatever TFDS makes of the rest of the name
            raise UsageError(field, name, f"TFDS cannot open it ({first_line(e)})") from e
        if builder.is_prepared():
            return builder
    try:  # aloud: a download takes its time
        builder.download_and_prepare(file_format="array_record")
    except Exception as e:  # no network, a missing package, a full disk: there is no common class
        with quiet():
            builder = tfds.builder(name, data_dir=root)
            if not builder.is_prepared():  # else another process was first
                remedy = f"TFDS cannot prepare it here ({first_line(e)}): prepare it elsewhere, as array_record"
                raise UsageError(field, name, remedy) from e
    return builder


def examples(
    builder: tfds.core.DatasetBuilder, split: str, *, name: tuple[str, str], split_field: str
) -> Sequence[Mapping]:
    """The examples of a split, by index; texts are bytes.

    Raises UsageError of `name`, a field and its value, for a format without random access, and of `split_field` for an
    unknown split.
    """
    try:
        return builder.as_data_source(split)
    except NotImplementedError:
        remedy = "prepare it with file_format=array_record: in its own format there is no random access"
        raise UsageError(*name, remedy) from None
    except ValueError as e:
        raise unknown(split_field, split, builder.info.splits) from e
