"""The one entry: `python infer.py [chat|run|bench|tables|pairs|check] …`. Everything else is in app/."""

import sys

if __name__ == "__main__":
    try:
        from app.cli import main

        code = main()
    except KeyboardInterrupt:  # while Python was still importing
        code = 130
    sys.exit(code)
