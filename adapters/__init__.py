if __name__ != "kvstore.adapters":
    raise ImportError("import kvstore.adapters, not adapters")
