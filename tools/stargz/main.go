// stargzd serves the stargz snapshotter on a socket, for registries in plain HTTP.
//
// It is put together from the library packages that Debian ships; Debian has no such program.
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"net/http"
	"path/filepath"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/contrib/snapshotservice"
	"github.com/containerd/containerd/reference"
	"github.com/containerd/containerd/remotes/docker"
	stargzfs "github.com/containerd/stargz-snapshotter/fs"
	"github.com/containerd/stargz-snapshotter/fs/config"
	"github.com/containerd/stargz-snapshotter/fs/source"
	"github.com/containerd/stargz-snapshotter/snapshot"
	"google.golang.org/grpc"
)

func main() {
	address := flag.String("address", "", "path of the socket to listen on")
	root := flag.String("root", "", "folder of all state")
	flag.Parse()
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = 16 // the default of 2 would close most connections after one use
	plain := docker.ConfigureDefaultRegistries(
		docker.WithPlainHTTP(docker.MatchAllHosts), docker.WithClient(&http.Client{Transport: transport}))
	hosts := func(image reference.Spec) ([]docker.RegistryHost, error) {
		return plain(image.Hostname())
	}
	from := stargzfs.WithGetSources(source.FromDefaultLabels(hosts))
	fs, err := stargzfs.NewFilesystem(filepath.Join(*root, "stargz"), config.Config{}, from)
	if err != nil {
		log.Fatal(err)
	}
	layers, err := snapshot.NewSnapshotter(
		context.Background(), filepath.Join(*root, "snapshotter"), fs, snapshot.AsynchronousRemove)
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", *address)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(layers))
	log.Fatal(server.Serve(listener))
}
