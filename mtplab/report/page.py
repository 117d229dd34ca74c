"""placeholder"""
def write(results):
    return results.store.folder / "page.html"
