"""The core: pages, the prefix tree, and plans. Standard library and numpy only."""
