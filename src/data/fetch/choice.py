"""Selects the files of a repository to fetch: of a model safetensors, tokenizer, configuration and templates; of a data set its
data. Names come from the hub, so each part of a path is checked before it is used."""

import json
import re

from errors import INPUT, INTEGRITY, FetchError

INDEX, WHOLE, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
CONFIGS = ("config.json", "adapter_config.json")
TEXTS = {*CONFIGS, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"}
TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")
DATA = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")
PART = re.compile(r"[A-Za-z0-9_+=,@ -][A-Za-z0-9._+=,@ -]*")


def plain(path):
    return len(path) < 1000 and all(PART.fullmatch(part) for part in path.split("/"))


def _refuse(request, what, next):
    raise FetchError(INPUT, what, request["name"], next)


def _weights(names, request, content):
    """`content`: returns the bytes of a file; None if the weights must not be requested yet."""
    if WHOLE in names:  # read in place of the index if both exist
        return {WHOLE}
    if INDEX in names:
        if content is None:
            return {INDEX}
        try:
            parts = set(json.loads(content(names[INDEX]))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchError(INTEGRITY, f"{INDEX} has no weight_map", request["name"], "tell the model's authors") from None
        missing = sorted(str(part) for part in parts if part not in names)
        if missing:
            _refuse(request, f"{INDEX} names {missing[0]}, which the repository does not have", "choose another revision or model")
        return {INDEX, *parts}
    if ADAPTER in names:
        return {ADAPTER}
    others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    _refuse(request, f"the repository has no {WHOLE}, {INDEX} or {ADAPTER}" +
            (f"; it has {', '.join(others[:3])}, which lmlaunch does not read (pickle files can run code)" if others else ""),
            "choose a repository with safetensors")


def chosen(revision, request, content):
    """Files, the one that makes the directory a model last."""
    names = {file.name: file for file in revision.files if plain(file.name)}
    if request["kind"] == "dataset":
        wanted = {name for name in names if name.endswith(DATA) and name != "dataset_infos.json"}
        if not wanted:
            _refuse(request, "the data set has no file that lmlaunch reads", f"it reads {', '.join(DATA)}")
    else:
        configs = {name for name in CONFIGS if name in names}
        if not configs:
            _refuse(request, "the repository has no config.json and no adapter_config.json", "name a model; for a data set add --data")
        wanted = configs
        if request["only"] != "config":
            wanted = configs | _weights(names, request, content) | {n for n in names if n in TEXTS or TEMPLATE.fullmatch(n)}
    return [names[name] for name in sorted(wanted, key=lambda name: (name in CONFIGS, names[name].size, name))]
