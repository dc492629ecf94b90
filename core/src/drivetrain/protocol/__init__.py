"""The data that parts of drivetrain exchange: DataProto, columns by reference, standard columns."""

from drivetrain.protocol.batch import ArrayColumns, TensorColumns
from drivetrain.protocol.columns import (
    STANDARD_COLUMNS,
    Column,
    check_columns,
    columns_markdown,
)
from drivetrain.protocol.dataproto import DataProto
from drivetrain.protocol.handles import (
    ColumnHandle,
    LocalHandle,
    RowView,
    concat_handles,
)
from drivetrain.protocol.padding import PADDING_COLUMN

__all__ = [
    "PADDING_COLUMN",
    "STANDARD_COLUMNS",
    "ArrayColumns",
    "Column",
    "ColumnHandle",
    "DataProto",
    "LocalHandle",
    "RowView",
    "TensorColumns",
    "check_columns",
    "columns_markdown",
    "concat_handles",
]
