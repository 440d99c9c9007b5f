"""Which keys of which tables hold names of other tables, and the tables that come with trainkit."""

from __future__ import annotations

from trainkit.jobs.devices import BUILT_IN_DEVICES

REFERENCES = {
    "jobs": {
        "cluster": "clusters",
        "model": "models",
        "dataset": "datasets",
        "container": "containers",
        "engine_source": "engines",
    },
    "clusters": {"device": "devices"},
    "datasets": {"tokenizer": "tokenizers"},
}
# keys of a dataset that hold { NAME = weight } or [NAME] of other datasets
BLENDS = ("blend", "valid_blend", "test_blend")
# keys that hold arrays of tables, and what their tables refer to, by a name or by several
ARRAYS_OF_TABLES = {
    "jobs": {"phases": {"dataset": "datasets"}, "evaluations": {"datasets": "datasets"}}
}
# keys that hold tables whose values are such names
TABLES_OF_REFERENCES = {"jobs": {"validation": "datasets"}}
BUILT_IN_TABLES: dict[str, dict[str, dict[str, object]]] = {
    "datasets": {"mock": {"source": "mock", "split": "90,10,0"}},
    "devices": BUILT_IN_DEVICES,
}
