"""Processes that may end while a test looks at them."""

import psutil


def alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and that its parent has not asked for yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Its words, and none of a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie's is one, too
        return ""


def name(process: psutil.Process) -> str:
    """Its name, and none of a process that has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
