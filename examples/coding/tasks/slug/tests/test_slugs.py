import unittest

from slugs import slug


class TestSlug(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("A small step"), "a-small-step")

    def test_more_than_one_space(self):
        self.assertEqual(slug("  A  small step "), "a-small-step")


unittest.main()
