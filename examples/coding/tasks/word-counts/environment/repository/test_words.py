import unittest

from words import counts


class TestCounts(unittest.TestCase):
    def test_words(self):
        self.assertEqual(counts("to be or not to be"), {"to": 2, "be": 2, "or": 1, "not": 1})

    def test_case_and_signs(self):
        self.assertEqual(counts("Stop! Did he say: stop?"), {"stop": 2, "did": 1, "he": 1, "say": 1})


unittest.main()
