"""Worker functions that hold an item until a test lets them go: `Scene`, and `assert_gone` for their processes."""

import os
import select


class Scene:
    """The pipes and the file by which worker functions report what they do. Both pipes stay open for reading and
    writing, so no open waits for the other end."""

    def __init__(self, path):
        for name in ("held", "go"):
            os.mkfifo(path / name)
        self.path = path
        self._held, self._go = (os.open(path / name, os.O_RDWR) for name in ("held", "go"))

    def holders(self, count=1):
        """The processes that hold an item now: returns once `count` lines say so."""
        text = b""
        while text.count(b"\n") < count:
            text += os.read(self._held, 1)
        return [int(number) for number in text.split()]

    def go(self):
        os.write(self._go, b".")

    @property
    def attempts(self):
        return (self.path / "attempts").stat().st_size

    def close(self):
        os.close(self._held)
        os.close(self._go)


def assert_gone(watched):
    """The processes behind these descriptors end within two seconds, as promised."""
    for descriptor in watched:
        gone = select.poll()
        gone.register(descriptor, select.POLLIN)
        assert gone.poll(2000), "a process outlives its owner"
        os.close(descriptor)
