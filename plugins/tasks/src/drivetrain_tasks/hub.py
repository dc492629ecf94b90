"""The dataset ``huggingface``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import Example, UserError, example_from_record

if TYPE_CHECKING:
    from drivetrain_tasks.configs import HuggingFaceConfig


class HuggingFaceDataset:
    """The rows of a split; a row becomes an example when it is asked for."""

    def __init__(self, config: HuggingFaceConfig) -> None:
        """Raises UserError when the package ``datasets`` is missing, or finds no such dataset or split."""
        self._config = config
        self._place = f"{config.path}[{config.split}]"
        try:
            import datasets
        except ImportError as error:
            raise UserError("dataset 'huggingface' needs the package datasets",
                            mend="pip install 'drivetrain-tasks[hub]'") from error  # fmt: skip
        try:
            rows = self._rows(datasets)
        except Exception as error:
            raise UserError(f"cannot load the dataset: {error}", where=self._place,
                            mend="look at path, subset and split") from error  # fmt: skip
        self._items = rows if config.limit is None else rows.select(range(min(config.limit, len(rows))))

    def _rows(self, datasets: Any) -> Any:
        config, folder = self._config, Path(self._config.path)
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(config.path)[config.split]
        if (folder / "state.json").is_file():
            saved = datasets.load_from_disk(config.path)
            if saved.split is not None and str(saved.split) != config.split:
                raise ValueError(f"the folder holds the split {saved.split}")
            return saved
        return datasets.load_dataset(config.path, config.subset, split=config.split)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source = Path(self._config.path).name
        where = f"{self._place} row {index}"
        return example_from_record(self._items[index], self._config, source=source, where=where)
