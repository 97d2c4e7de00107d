import unittest

from roman import number


class TestNumber(unittest.TestCase):
    def test_letters_are_added(self):
        self.assertEqual(number("MDCLXVI"), 1666)

    def test_a_smaller_letter_before_a_larger_one(self):
        self.assertEqual(number("XIV"), 14)
        self.assertEqual(number("MCMXC"), 1990)


unittest.main()
