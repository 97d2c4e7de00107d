"""WebShop (Yao et al., 2022): a web shop as text. Products, search, pages and the original's rewards, without Java."""
