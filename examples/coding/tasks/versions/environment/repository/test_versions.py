import unittest

from versions import newest


class TestNewest(unittest.TestCase):
    def test_parts_of_one_digit(self):
        self.assertEqual(newest(["1.2.3", "1.3.0"]), "1.3.0")

    def test_parts_of_two_digits(self):
        self.assertEqual(newest(["1.9.0", "1.10.0"]), "1.10.0")


unittest.main()
