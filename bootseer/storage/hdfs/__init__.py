"""HDFS by its own protocols: through hdfs-native, and through the cluster's libhdfs."""
