"""Start a teacher engine with API keys that appear neither in its arguments nor in its log.

This file is not imported by the operator: its text is the program of `python3 -c` in the engine's own image, so it uses
nothing but the standard library. SGLang 0.5.23 and LMDeploy 0.18.0 take keys as arguments only, which every process of the
node could read in /proc. SGLang also prints all its settings at start, keys included.

Arguments: `sglang` or `lmdeploy`, then the engine's own. Keys: OPD_TEACHER_API_KEY, OPD_TEACHER_ADMIN_KEY.
"""

import json
import logging
import os
import runpy
import sys
from typing import Any

KEY_FILE = "/run/opd/engine.yaml"


def hide(keys: tuple[str, ...]) -> None:
    """Make every log record of this process show *** instead of a key."""
    make_record = logging.getLogRecordFactory()

    def make_clean_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        text = record.getMessage()
        if any(key in text for key in keys):
            for key in keys:
                text = text.replace(key, "***")
            record.msg, record.args = text, None
        return record

    logging.setLogRecordFactory(make_clean_record)


def main() -> None:
    """Hide the keys, hand them to the engine, become the engine."""
    engine, *arguments = sys.argv[1:]
    keys = {"api-key": os.environ["OPD_TEACHER_API_KEY"], "admin-api-key": os.environ["OPD_TEACHER_ADMIN_KEY"]}
    hide(tuple(keys.values()))
    if engine == "sglang":
        os.umask(0o077)
        with open(KEY_FILE, "w") as file:
            json.dump(keys, file)  # JSON is YAML
        os.umask(0o022)
        sys.argv = ["sglang.launch_server", "--config", KEY_FILE, *arguments]
        module = "sglang.launch_server"
    else:
        # In-process arguments are invisible to /proc.
        sys.argv = ["lmdeploy", "serve", "api_server", *arguments, "--api-keys", keys["api-key"]]
        module = "lmdeploy"
    # alter_sys: child processes that are spawned import the main module by its name.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
