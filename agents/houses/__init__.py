"""Games of TextWorld-Express that are searches of a house, with short turns: what CoinCollector and MapReader share."""
