"""Prompts for demonstrations: Python of our own that the shipped model was not trained on, cut off in its middle."""

STACK = '''\
class Stack:
    """A last-in, first-out collection of items."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        """Add an item to the top of the stack."""
        self._items.append(item)

    def pop(self):
        """Remove and return the item at the top of the stack."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        return self._items.pop()

    def __len__(self):
        return len(self.'''

TESTS = """\
import unittest

from shapes import Circle, Square


class SquareTest(unittest.TestCase):

    def test_area(self):
        self.assertEqual(Square(3).area(), 9)
        self.assertEqual(Square(0).area(), 0)

    def test_negative_side(self):
        with self.assertRaises(ValueError):
            Square(-1)


class CircleTest(unittest.TestCase):

    def test_"""

PARSER = '''\
def parse_line(line, separator="="):
    """Split a line of a settings file into a name and a value.

    Return None for an empty line and for a comment.
    """
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    name, found, value = line.partition(separator)
    if not found:
        raise ValueError("no %r in line %r" % (separator, line))
    return name.strip(), value.strip()


def parse_file(filename):
    """Return a dictionary of the settings in a file."""
    '''

PROMPTS = {"a class": STACK, "a unit test": TESTS, "a function": PARSER}
SAMPLED_AT = 0.8  # temperature of the one demonstration that is not greedy
