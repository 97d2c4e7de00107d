import unittest

from lists import chunks


class TestChunks(unittest.TestCase):
    def test_a_shorter_last_one(self):
        self.assertEqual(chunks([1, 2, 3, 4, 5], 2), [[1, 2], [3, 4], [5]])

    def test_no_items(self):
        self.assertEqual(chunks([], 2), [])


unittest.main()
