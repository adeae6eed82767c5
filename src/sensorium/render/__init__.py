"""From messages to a prompt: text with one marker per media item, the media beside it as it came.

Nothing here opens a URL, a file or a picture.
"""
