import unittest

from intervals import merged


class TestMerged(unittest.TestCase):
    def test_apart(self):
        self.assertEqual(merged([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_touching(self):
        self.assertEqual(merged([(1, 3), (3, 5)]), [(1, 5)])

    def test_one_within_another(self):
        self.assertEqual(merged([(1, 9), (2, 3)]), [(1, 9)])


unittest.main()
