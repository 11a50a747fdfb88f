"""Whether the pages of a Parquet file carry checksums: read from the page headers, as no reader tells.

Without them a flipped bit is handed on as data, with compressed pages as well.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from ingest.thrift import chunks_of_group, footer_bytes

_HEADER_BYTES = 64
_CRC_FIELD = 4
_I32 = 5  # the compact protocol's number of the type


def has_crc(header: bytes) -> bool:
    """Of a page header (Thrift's compact protocol): type, two sizes, and then perhaps the checksum, all int32."""
    at, field = 0, 0
    while at < len(header):
        step, kind = header[at] >> 4, header[at] & 15
        field += step
        at += 1
        if not step or kind != _I32 or field > _CRC_FIELD:
            return False
        if field == _CRC_FIELD:
            return True
        while at < len(header) and header[at] & 0x80:  # the number's bytes but the last
            at += 1
        at += 1
    return False


def chunks_with_crc(file: pa.NativeFile, metadata: pq.FileMetaData) -> tuple[int, int]:
    """Column chunks whose first page has a checksum, and all chunks, of the first row group and of the last."""
    having = total = 0
    for number in sorted({0, metadata.num_row_groups - 1} - {-1}):
        for chunk in chunks_of_group(footer_bytes(metadata), number):
            file.seek(chunk.start)
            having += has_crc(file.read(_HEADER_BYTES))
            total += 1
    return having, total
