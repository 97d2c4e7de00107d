"""TextWorld-Express (Jansen and Cote, 2022): the fast environment, thousands of steps a second, and its agent."""
