package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/image"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

const (
	capSysResource = 24 // capability.h
	// cpuWeight keeps the cluster responsive beside a heavy build: eight ordinary processes' worth.
	cpuWeight     = 8 * 1024
	startTimeout  = 90 * time.Second
	readyInterval = 100 * time.Millisecond
)

// Up brings up each part of the cluster that is missing, changed or broken.
func Up(ctx context.Context, o Options) error {
	if err := o.Config.Validate(); err != nil {
		return err
	}
	p := newProgress(o.Out, o.Began)
	o.Config.OwnGC = o.Manifests != "" || collects(o.Config)
	if err := prepareHost(ctx, &o, p); err != nil {
		return err
	}
	release, err := lock(o.Config)
	if err != nil {
		return err
	}
	defer release()
	if err := own(o.Config); err != nil {
		return err
	}
	if err := startComponents(ctx, o.Config, p); err != nil {
		return err
	}
	var digests map[string]string
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		digests, err = importImages(groupCtx, o, p)
		return err
	})
	group.Go(func() error { return waitReady(groupCtx, o.Config, p) })
	if err := group.Wait(); err != nil {
		return err
	}
	if err := installSandbox(ctx, o, digests, p); err != nil {
		return err
	}
	if o.Demo && o.Manifests != "" {
		if err := demo(ctx, o.Config, p); err != nil {
			return err
		}
	}
	if o.Config.Traces {
		p.say("traces are stored; show one with: fsb-ctl trace NAME (query API: %s)", components.JaegerURL())
	}
	p.say("the cluster is up; to use it: eval \"$(%s env)\"", o.Config.Binary())
	return nil
}

// collects reports whether Fast Sandbox collects garbage in the running cluster. A later `up` without manifests leaves it
// installed, and without this there would be two collectors.
func collects(c components.Config) bool {
	before, err := LoadConfig(c.ConfigFile())
	return err == nil && before.OwnGC
}

// HasTraces reports whether a trace store runs beside the cluster: every command then has it among the components, and a
// later `up` keeps it.
func HasTraces(c components.Config) bool {
	before, err := LoadConfig(c.ConfigFile())
	return err == nil && before.Traces
}

// prepareHost checks the machine, installs missing packages, and completes the Config.
func prepareHost(ctx context.Context, o *Options, p *progress) error {
	if err := host.Preflight(ctx); err != nil {
		return err
	}
	programs := []string{
		o.Config.Binary(), filepath.Join(o.Config.ContainerdBin(), "containerd"),
		filepath.Join(o.Config.ContainerdBin(), "containerd-shim-runc-v2"), filepath.Join(o.Config.ContainerdBin(), "ctr"),
	}
	if o.Config.Traces {
		programs = append(programs, o.Config.JaegerBinary())
	}
	var missing error
	for _, path := range programs {
		if _, err := os.Stat(path); err != nil {
			missing = errors.Join(missing, fmt.Errorf("looking for our own programs (--bin-dir): %w", err))
		}
	}
	if missing != nil {
		return missing
	}
	if err := refuseNode(o.Config); err != nil {
		return err
	}
	needs := host.Needs()
	installed, err := host.Install(ctx, needs)
	if err != nil {
		return err
	}
	if len(installed) > 0 {
		p.say("packages installed: %v", installed)
	}
	o.Config.CNIDir = host.Need{Dirs: host.CNIDirs(), Files: []string{"ptp", "host-local"}}.Find()
	able, err := host.HasCapability(capSysResource)
	if err != nil {
		return err
	}
	o.Config.NoSysResource = !able
	o.Config.ResolvConf = network.ResolvConf()
	p.say("the machine has what the cluster needs; next: network, certificates, configuration")
	return nil
}

// refuseNode refuses a machine that is a Kubernetes node already: two kubelets would conflict over directories with fixed
// paths. A kubelet inside a container (kind) has its own.
func refuseNode(c components.Config) error {
	all, err := host.Processes()
	if err != nil {
		return err
	}
	for _, info := range all {
		if info.Program(filepath.Base(c.Binary())) == components.Kubelet && !info.InCgroup(components.RootCgroup) && info.SharesMounts() {
			return fmt.Errorf("this machine is a node of another Kubernetes already: a kubelet runs as process %d", info.PID)
		}
	}
	return nil
}

// startComponents leaves a supervisor running with exactly this configuration.
func startComponents(ctx context.Context, c components.Config, p *progress) error {
	if !supervisor(c).Alive() {
		if err := stopStrays(ctx, c, p); err != nil {
			return err
		}
	}
	if err := network.Up(ctx, c.NetworkState(), p.warn); err != nil {
		return err
	}
	cgroups, err := host.FindCgroups()
	if err != nil {
		return err
	}
	for _, path := range []string{components.RootCgroup, components.SystemCgroup} {
		if err := cgroups.Create(path, cpuWeight); err != nil {
			return err
		}
	}
	if err := ensureKubernetesPKI(c, time.Now()); err != nil {
		return err
	}
	generation, err := writeFiles(c)
	if err != nil {
		return err
	}
	generationFile := filepath.Join(c.RunDir, "generation")
	before, _ := os.ReadFile(generationFile)
	if supervisor(c).Alive() {
		if string(before) == generation {
			p.say("the components run already; next: the images")
			return nil
		}
		p.say("configuration or programs changed; next: restarting the components")
		if err := stopSupervisor(ctx, c); err != nil {
			return err
		}
	}
	if err := makeSharedDirs(c, p); err != nil {
		return err
	}
	if err := startSupervisor(ctx, c); err != nil {
		return err
	}
	p.say("network, certificates and configuration are ready; next: %d components, and the images", len(c.All()))
	_, err = host.WriteFile(generationFile, []byte(generation), 0o644)
	return err
}

// makeSharedDirs makes the directories that agents share with the node. containerd's state is in memory, as on a node whose /run is a
// tmpfs: containerd waits for the disk (fsync) each time that it starts a shim. A mount that a killed run left is used again.
func makeSharedDirs(c components.Config, p *progress) error {
	for _, dir := range c.SharedDirs() {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("making a directory for containers: %w", err)
		}
	}
	if err := host.InMemory(c.ContainerdState()); err != nil {
		p.warn("containers start more slowly than on other nodes: " + err.Error())
	}
	for _, dir := range c.SharedDirs() {
		if err := host.Share(dir); err != nil {
			p.warn("volumes with mount propagation do not work: " + err.Error())
		}
	}
	return nil
}

// writeFiles writes the configuration and returns a digest of all that running components depend on: their
// configuration, their certificates and their programs.
func writeFiles(c components.Config) (generation string, err error) {
	config, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return "", fmt.Errorf("encoding the cluster's configuration: %w", err)
	}
	files, err := c.Files()
	if err != nil {
		return "", err
	}
	files = append(files, components.File{Path: c.ConfigFile(), Content: config})
	sum := sha256.New()
	for _, file := range files {
		if _, err := host.WriteFile(file.Path, file.Content, 0o644); err != nil {
			return "", err
		}
		_, _ = fmt.Fprintf(sum, "%s\n%s\n", file.Path, file.Content)
	}
	for _, certificate := range c.Certificates() {
		raw, err := os.ReadFile(certificate.Files.Cert)
		if err != nil {
			return "", fmt.Errorf("reading a certificate: %w", err)
		}
		_, _ = sum.Write(raw)
	}
	for _, component := range c.All() {
		info, err := os.Stat(component.Path)
		if err != nil {
			return "", fmt.Errorf("looking at a program: %w", err)
		}
		_, _ = fmt.Fprintln(sum, component.Path, info.Size(), info.ModTime().UnixNano(), component.Args, component.Env)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// waitReady waits for the components in their order, then for the node.
func waitReady(ctx context.Context, c components.Config, p *progress) error {
	for _, component := range c.All() {
		if err := waitComponent(ctx, c, component); err != nil {
			return err
		}
		p.say("%s is ready", component.Name)
	}
	return waitNode(ctx, c, p)
}

func waitComponent(ctx context.Context, c components.Config, component components.Component) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := host.Poll(ctx, readyInterval, func(ctx context.Context) error { return c.Check(ctx, component.Probe) })
	if err != nil {
		return fmt.Errorf("waiting for %s (see `fsb-local logs %s`): %w", component.Name, component.Name, err)
	}
	return nil
}

// importImages imports what has changed and returns the digest of every image by its name.
func importImages(ctx context.Context, o Options, p *progress) (map[string]string, error) {
	if err := waitComponent(ctx, o.Config, o.Config.All()[0]); err != nil {
		return nil, err
	}
	descriptions, err := image.Load(o.Images)
	if err != nil {
		return nil, err
	}
	store := image.Store{Socket: o.Config.ContainerdSocket(), Bin: o.Config.ContainerdBin()}
	have, err := store.Digests(ctx)
	if err != nil {
		return nil, err
	}
	builder := image.Builder{BinDir: o.Config.BinDir, CacheDir: o.Config.CacheDir()}
	digests := make(map[string]string)
	imported := 0
	for _, description := range descriptions {
		built, err := builder.Build(ctx, description)
		if errors.Is(err, image.ErrNotBuilt) || (err != nil && description.Optional && ctx.Err() == nil) {
			p.warn("image left out: " + err.Error())
			continue
		}
		if err != nil {
			return nil, err
		}
		digests[built.Name] = built.Digest.String()
		if have[built.Name] == built.Digest.String() {
			continue
		}
		if err := store.Import(ctx, built); err != nil {
			return nil, err
		}
		imported++
	}
	p.say("%d images are imported, %d of them new", len(digests), imported)
	return digests, nil
}
