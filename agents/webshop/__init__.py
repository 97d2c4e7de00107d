"""WebShop (Yao et al., 2022): a web shop as text. Products, search, pages and the original rewards, without Java."""
