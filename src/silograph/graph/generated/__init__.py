"""Generated graphs: the law of their draws, and the folders of arrays that hold them."""
