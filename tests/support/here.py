"""Where servers of tests listen: on loopback, at any free port, without a DHT."""

from peers.reach.listen import Listen, Outside

HERE = Listen(host="127.0.0.1", port=0, outside=(Outside("127.0.0.1"),), dht_addresses=())
