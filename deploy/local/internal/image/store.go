package image

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"

	images "github.com/containerd/containerd/api/services/images/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// Store is the image store of a containerd, as Kubernetes sees it.
type Store struct {
	// Socket is containerd's, Bin the directory of its ctr.
	Socket, Bin string
}

// namespace is the containerd namespace of Kubernetes.
const namespace = "k8s.io"

// Digests returns the digest of every image, by its name.
func (s Store) Digests(ctx context.Context) (map[string]string, error) {
	conn, err := grpc.NewClient("unix://"+s.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("connecting to containerd: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
	list, err := images.NewImagesClient(conn).List(ctx, &images.ListImagesRequest{})
	if err != nil {
		return nil, fmt.Errorf("listing images: %w", err)
	}
	digests := make(map[string]string)
	for _, image := range list.GetImages() {
		digests[image.GetName()] = image.GetTarget().GetDigest()
	}
	return digests, nil
}

// Import puts an image into the store, unpacked and ready to run.
func (s Store) Import(ctx context.Context, image *Image) error {
	return s.ImportArchive(ctx, image.Name, image.Write)
}

// ImportArchive imports what write writes: an OCI or docker archive.
func (s Store) ImportArchive(ctx context.Context, name string, write func(io.Writer) error) error {
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "ctr"), "--address", s.Socket, "--namespace", namespace,
		"images", "import", "-")
	input, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("importing %s: %w", name, err)
	}
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("importing %s: %w", name, err)
	}
	// ctr may stop reading early when it fails; its message is more useful than our broken pipe.
	writeErr := write(input)
	_ = input.Close()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("importing %s: %w: %s", name, err, strings.TrimSpace(output.String()))
	}
	if writeErr != nil {
		return fmt.Errorf("importing %s: %w", name, writeErr)
	}
	return nil
}
