"""Runs the launcher many times at the price of one import.

`python -m sglang.launch_server` spends over ten seconds on imports before it reads a flag. This process imports the
same modules once and then forks for each request: the child sets its arguments and environment and runs the launcher's
module as `__main__`, which loads plugins, parses, resolves and starts, or refuses.

One JSON object a line on stdin: {"args": [...], "env": {...}, "output": path}. One line back: the exit code.
"""

import json
import os
import runpy
import sys
import time

# What a scheduler process refuses comes after its own imports, which take most of a minute on a busy machine.
LIMIT_S = 240


def launch(args, env, output):
    """The child: never returns to the loop."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    sys.argv = ["launch_server", *args]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def main():
    import sglang.launch_server  # noqa: F401

    from sglang_dsa_plugin.adapter import contract

    # Imports what the plugin will look at, and registers nothing.
    contract.problems()
    # A server that is not refused goes on to start processes; it must not outlive the limit, nor they it.
    for line in sys.stdin:
        case = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            launch(**case)
            os._exit(0)
        print(wait(pid), flush=True)


def wait(pid):
    """Exit code of the child, or "alive" when it had to be ended after the limit."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    return "alive"


if __name__ == "__main__":
    main()
