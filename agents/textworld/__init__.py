"""TextWorld (Côté et al. 2018, arXiv 1806.11532): games that it makes itself, whose quests chance does not solve."""
