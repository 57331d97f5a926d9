"""The program: `python infer.py [COMMAND] …`; --help lists the commands, which are in app/."""

import gc
import os
import signal
import sys

# Collect garbage rarely: objects made during the start stay alive, and looking through them takes a tenth of the start.
gc.set_threshold(100_000, 50, 50)

# OpenMP's threads wait for each other by spinning. Without a bound a pass takes many times longer as soon as
# another program wants the cores; this bound costs nothing measurable on a quiet machine (docs/notes/passes.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if __name__ == "__main__":
    try:
        from app.command_line.main import main

        code = main()
    except KeyboardInterrupt:  # while Python was still importing
        code = 130
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error}: python -m pip install -r requirements.txt installs what is needed\n")
        code = 1
    finally:  # ignore another Ctrl-C: nothing is left to stop, and it would replace the exit code
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # the interpreter's end looks through all that is not frozen: half a second after torch's import
    sys.exit(code)
