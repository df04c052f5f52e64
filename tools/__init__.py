if __name__ != "kvstore.tools":
    raise ImportError("import kvstore.tools, not tools")
