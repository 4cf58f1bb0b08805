"""normwise (being built)"""
