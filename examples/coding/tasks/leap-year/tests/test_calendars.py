import unittest

from calendars import is_leap


class TestIsLeap(unittest.TestCase):
    def test_every_fourth_year(self):
        self.assertTrue(is_leap(2024))
        self.assertFalse(is_leap(2023))

    def test_centuries(self):
        self.assertFalse(is_leap(1900))
        self.assertTrue(is_leap(2000))


unittest.main()
