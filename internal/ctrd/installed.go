package ctrd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/shim"
)

// NoContainer is an id that no container has.
const NoContainer = "fsb-none"

// AwaitWrites returns when all is visible that containerd was asked to write before, by any client: writes wait for each other.
func AwaitWrites(ctx context.Context, c *client.Client) error {
	if err := c.ContainerService().Delete(ctx, NoContainer); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("waiting for containerd's writes: %w", err)
	}
	return nil
}

// ShimsInUse returns which installed versions of our shim a record of a container or of the sandbox store names, in any namespace, or a process
// executes. A process that cannot be identified counts by its command line.
func (r *Remover) ShimsInUse(ctx context.Context, versions []string) (map[string]bool, error) {
	found := map[string]bool{}
	add := func(path string) { found[shim.Version(strings.TrimSuffix(path, deleted))] = true }
	if err := r.eachRuntime(ctx, add); err != nil {
		return nil, err
	}
	if err := r.processes().eachProgram(add); err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, v := range versions {
		used[v] = found[v]
	}
	return used, nil
}

// eachRuntime calls add with the runtime of each record.
func (r *Remover) eachRuntime(ctx context.Context, add func(runtime string)) error {
	step, cancel := r.step(ctx)
	defer cancel()
	if err := AwaitWrites(step, r.Client); err != nil {
		return err
	}
	all, err := r.Client.NamespaceService().List(step)
	if err != nil {
		return fmt.Errorf("listing namespaces: %w", err)
	}
	for _, ns := range all {
		in := namespaces.WithNamespace(step, ns)
		list, err := r.Client.ContainerService().List(in)
		if err != nil {
			return fmt.Errorf("listing containers: %w", err)
		}
		for _, c := range list {
			add(c.Runtime.Name)
		}
		records, err := r.Client.SandboxStore().List(in)
		if errdefs.IsNotImplemented(err) { // containerd before 1.7
			continue
		}
		if err != nil {
			return fmt.Errorf("listing the records of shims: %w", err)
		}
		for _, s := range records {
			add(s.Runtime.Name)
		}
	}
	return nil
}

// eachProgram calls add with the program of each process of the host, and with what its command line says that this is.
func (p processes) eachProgram(add func(path string)) error {
	if p.root == "" {
		return fmt.Errorf("finding the programs of processes needs the host's /proc: %w", errdefs.ErrFailedPrecondition)
	}
	if _, err := os.ReadDir(p.root); err != nil {
		return fmt.Errorf("finding the programs of processes: %w", err)
	}
	for _, pid := range p.pids() {
		dir := filepath.Join(p.root, strconv.Itoa(pid))
		path, err := os.Readlink(filepath.Join(dir, "exe"))
		if err == nil {
			add(path)
		}
		if !errors.Is(err, os.ErrPermission) {
			continue
		}
		if line, err := os.ReadFile(filepath.Join(dir, "cmdline")); err == nil {
			program, _, _ := bytes.Cut(line, []byte{0})
			add(string(program))
		}
	}
	return nil
}
