import unittest

from stats import median


class TestMedian(unittest.TestCase):
    def test_of_an_odd_count(self):
        self.assertEqual(median([5, 1, 3]), 3)

    def test_of_an_even_count(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)


unittest.main()
