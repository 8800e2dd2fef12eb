"""The hash of a row, as the check of a chain computes it: that of the canonical JSON, whatever the columns have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.log.base import FIRST_HASH
from shared.log.chain import ChainCheck, has_its_hash, row_hash
from shared.log.schema import COLUMNS, TABLE, StoredRow

NUMBERS = {"position", "stream_version", "schema_version"}
CELLS = st.text() | st.text(alphabet='"\\/\x00\x1f\x7f\x80\u2028\ud7ff\ue000\U0010ffff\n\r\t\b\f<>&')
ROWS = st.fixed_dictionaries({name: st.integers(1, 2**63 - 1) if name in NUMBERS else CELLS for name in COLUMNS})


@given(ROWS, st.sampled_from([name for name in COLUMNS if name != "hash"]))
@settings(deadline=None)
def test_a_row_has_the_hash_that_it_was_appended_with_and_none_other(row: dict[str, Any], name: str) -> None:
    stored = StoredRow(**{**row, "hash": row_hash(row)})
    assert has_its_hash(stored)
    assert not has_its_hash(stored._replace(**{name: row[name] + (1 if name in NUMBERS else "x")}))


def test_a_stored_row_has_the_columns_of_the_table() -> None:
    assert COLUMNS == [column.name for column in TABLE.columns]


def test_text_that_is_no_text_has_no_hash() -> None:
    row: dict[str, Any] = {name: 1 if name in NUMBERS else "text" for name in COLUMNS}
    row |= {"previous_hash": FIRST_HASH, "hash": row_hash(row | {"previous_hash": FIRST_HASH})}
    stored = StoredRow(**row)
    assert ChainCheck().next(stored) == ""
    for data in (b"text", None, "\udcff"):
        assert ChainCheck().next(stored._replace(data=data)) != ""
    with pytest.raises(TypeError):
        has_its_hash(stored._replace(data=b"text"))
