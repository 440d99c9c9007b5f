"""Holds documents to the schemas that JobSet and Kubernetes publish. Run by a Python that has
kubernetes-validate, jsonschema and PyYAML: `check_manifests.py CRD < DOCUMENTS`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSIONS = ("1.30", "1.33", "1.36")


def strict(schema: Any) -> Any:
    """The schema, in which an object that has `properties` has no others."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        made["additionalProperties"] = False
    return made


def main() -> None:
    with open(sys.argv[1]) as file:
        (version,) = yaml.safe_load(file)["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    wrong = []
    for document in json.load(sys.stdin):
        jobs = [document]
        if document["kind"] == "JobSet":
            found = jsonschema.Draft7Validator(schema).iter_errors(document)
            wrong += [f"{list(error.path)}: {error.message}" for error in found]
            jobs = [
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
                for spec in (
                    each["template"]["spec"] for each in document["spec"]["replicatedJobs"]
                )
            ]
        for job in jobs:
            for known in VERSIONS:
                try:
                    kubernetes_validate.validate(job, known, strict=True)
                except kubernetes_validate.ValidationError as error:
                    wrong.append(f"{known}: {list(error.path)}: {error.message}")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
