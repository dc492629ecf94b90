"""The data that parts of drivetrain exchange: DataProto, columns by reference, standard columns."""

from drivetrain.protocol.columns import STANDARD_COLUMNS, check_columns, columns_markdown
from drivetrain.protocol.dataproto import DataProto
from drivetrain.protocol.handles import ColumnHandle, LocalHandle
from drivetrain.protocol.units import units

__all__ = ["STANDARD_COLUMNS", "ColumnHandle", "DataProto", "LocalHandle", "check_columns", "columns_markdown", "units"]
