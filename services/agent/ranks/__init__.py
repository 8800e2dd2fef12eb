"""The rank processes of a node: forked, configured, listened to, limited, ended."""
