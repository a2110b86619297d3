package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

const downTimeout = 90 * time.Second

// Down removes the cluster, however broken it is: processes, containers, mounts, network, cgroups, files. It continues
// after a failure and returns all failures at the end, so that it can be called again.
func Down(ctx context.Context, o Options) error {
	if err := o.Config.Validate(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("removing the cluster needs root (sudo)")
	}
	p := newProgress(o.Out, o.Began)
	release, err := lock(o.Config)
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, downTimeout)
	defer cancel()
	c := o.Config

	var failed error
	step := func(name string, err error) {
		if err != nil {
			failed = errors.Join(failed, err)
			p.warn(err.Error())
			return
		}
		p.say("%s", name)
	}
	if supervisor(c).Alive() {
		step("the components are stopped", stopSupervisor(ctx, c))
	}
	rest := findRemains(c)
	step("no process is left", killAll(ctx, c, rest))
	step("no mount is left", unmount(ctx, c))
	step("no cgroup is left", removeCgroups(ctx, rest))
	step("no network is left", network.Down(ctx, c.NetworkState()))
	step("state and logs are removed", removeFiles(c, rest, o.Purge))
	if failed != nil {
		return fmt.Errorf("removing the cluster: %w", failed)
	}
	_ = os.Remove(lockFile)
	if kept := kept(c); len(kept) > 0 {
		p.say("the cluster is down; kept: %s (--purge removes it)", strings.Join(kept, ", "))
		return nil
	}
	p.say("the cluster is down; nothing of it is left")
	return nil
}

// caches returns the directories that outlive Down: what is slow to download, and the user's registry settings.
func caches(c components.Config) []string {
	return []string{c.CacheDir(), filepath.Join(c.DataDir, "certs.d")}
}

// kept returns the caches that exist.
func kept(c components.Config) []string {
	return slices.DeleteFunc(caches(c), func(dir string) bool {
		_, err := os.Stat(dir)
		return err != nil
	})
}

// ownPaths returns everything that the cluster writes below directories of its own; with purge, the caches too.
func ownPaths(c components.Config, purge bool) []string {
	paths := append(c.StateDirs(), c.RunDir, components.AgentSlotDir, components.AgentLogDir)
	if purge {
		paths = append(paths, caches(c)...)
	}
	return paths
}

// removeFiles removes what the cluster has written; with purge, the caches too.
func removeFiles(c components.Config, rest remains, purge bool) error {
	paths := ownPaths(c, purge)
	for _, task := range rest.tasks {
		paths = append(paths, filepath.Join(runcRoot, task.namespace, task.id))
		streams, _ := filepath.Glob(filepath.Join(fifoRoot, "*", task.id+"-std*"))
		for _, stream := range streams {
			paths = append(paths, filepath.Dir(stream))
		}
	}
	paths = append(paths, shared(c)...)
	var failed error
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			failed = errors.Join(failed, fmt.Errorf("removing the state: %w", err))
		}
	}
	// Directories that others may share go only when nothing is in them.
	for _, task := range rest.tasks {
		removeEmpty(filepath.Join(runcRoot, task.namespace))
	}
	removeEmpty(runcRoot, fifoRoot, filepath.Dir(runcRoot), podLogLinks, cniResults, filepath.Dir(cniResults), devicePlugins,
		filepath.Dir(devicePlugins), filepath.Dir(components.AgentSlotDir), c.DataDir)
	return failed
}

// unmount unmounts all that containers and Pods have mounted, and what is mounted on itself for their sake.
func unmount(ctx context.Context, c components.Config) error {
	own, err := host.SelfMounted(append(c.SharedDirs(), c.KubeletDir())...)
	if err != nil {
		return err
	}
	return host.Unmount(ctx, own,
		[]string{c.KubeletDir(), c.ContainerdRoot(), c.ContainerdState(), c.RunDir})
}

// shared returns the cluster's files in directories with a fixed path, which other clusters may use too.
func shared(c components.Config) []string {
	paths := []string{filepath.Join(devicePlugins, "kubelet.sock"), filepath.Join(devicePlugins, "kubelet_internal_checkpoint")}
	links, _ := filepath.Glob(filepath.Join(podLogLinks, "*"))
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.HasPrefix(target, c.PodLogDir()+"/") {
			paths = append(paths, link)
		}
	}
	results, _ := filepath.Glob(filepath.Join(cniResults, components.NodeName+"-*-eth0"))
	for _, result := range results {
		sandbox := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(result), components.NodeName+"-"), "-eth0")
		paths = append(paths, result, filepath.Join(cniResults, "cni-loopback-"+sandbox+"-lo"))
	}
	return paths
}

const (
	// cniResults is where CNI's library caches the results of its plugins, for every network of the machine.
	cniResults = "/var/lib/cni/results"
	// devicePlugins is where every kubelet serves device plugins.
	devicePlugins = "/var/lib/kubelet/device-plugins"
	// runcRoot is where containerd's shim keeps runc's state, by namespace, for clients that do not say otherwise.
	runcRoot = "/run/containerd/runc"
	// fifoRoot is where containerd's clients make the streams of their containers.
	fifoRoot = "/run/containerd/fifo"
	// podLogLinks is where every kubelet links its Pods' logs.
	podLogLinks = "/var/log/containers"
)

func removeEmpty(dirs ...string) {
	for _, dir := range dirs {
		_ = unix.Rmdir(dir)
	}
}

func removeCgroups(ctx context.Context, rest remains) error {
	cgroups, err := host.FindCgroups()
	if err != nil {
		return err
	}
	failed := cgroups.Remove(ctx, components.RootCgroup)
	// A container that a client of containerd's made without Kubernetes has its cgroup elsewhere, by default below its
	// namespace's name. Those cgroups are empty now, or another cluster's: one attempt, without recursion.
	for _, path := range rest.cgroups {
		for _, tree := range cgroups {
			for dir := path; dir != "/" && dir != "."; dir = filepath.Dir(dir) {
				removeEmpty(filepath.Join(tree.Root, dir))
			}
		}
	}
	return failed
}
