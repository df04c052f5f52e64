if __name__ != "kvstore.tiers":
    raise ImportError("import kvstore.tiers, not tiers")
