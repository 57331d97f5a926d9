"""Errors that a user can mend. Shown as one line; a traceback only with --verbose."""

from __future__ import annotations


class UserError(Exception):
    """One line that names what is wrong, the value given and what is allowed."""

    exit_code = 1


class UsageError(UserError):
    """A wrong flag, command, setting or configuration file."""

    exit_code = 2
