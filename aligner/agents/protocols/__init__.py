"""Wire formats of the model server: each is translated to and from the same requests and answers.

`requests` defines the requests and answers, which do not depend on the wire format. Each other
module parses the bodies of one wire format and formats its answers; `wire_format` is their
interface.
"""
