// Package command is the command line by which containerd executes a shim: start, delete, -info, and the shim itself. containerd's
// own package for that, pkg/shim, speaks only the newest form of it, and takes more memory and more time to start.
package command

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/apparmor"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/task"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
)

// Name is the runtime's name.
const Name = "io.containerd.fsb.v1"

// cgroupRoot is where containerd's host has its cgroups.
const cgroupRoot = "/sys/fs/cgroup"

// version is that of the interface to containerd: with it, containers join a shim without another execution of this program.
const version = 3

// maxInput bounds what containerd says at the start.
const maxInput = 10 << 20

type options struct {
	namespace, id, address, ttrpcAddress string
	info, version                        bool
	action                               string
}

// Run is the program. It returns the exit code.
func Run(ctx context.Context, args []string) int {
	if err := run(ctx, args); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Name, err)
		return 1
	}
	return 0
}

func run(ctx context.Context, args []string) error {
	var o options
	flags := flag.NewFlagSet(Name, flag.ContinueOnError)
	flags.StringVar(&o.namespace, "namespace", "", "namespace of the containers")
	flags.StringVar(&o.id, "id", "", "id of the container")
	flags.StringVar(&o.address, "address", "", "address of containerd")
	flags.BoolVar(&o.info, "info", false, "print what this runtime is, as a protobuf message")
	flags.BoolVar(&o.version, "v", false, "print the name of this runtime")
	for _, ignored := range []string{"bundle", "publish-binary", "socket", "debug-socket"} {
		flags.String(ignored, "", "for compatibility")
	}
	flags.Bool("debug", false, "for compatibility")
	if err := flags.Parse(args); err != nil {
		return err
	}
	o.action, o.ttrpcAddress = flags.Arg(0), config.Env("TTRPC_ADDRESS")
	switch {
	case o.version:
		fmt.Println(Name)
		return nil
	case o.info:
		return answer(&types.RuntimeInfo{Name: Name, Version: &types.RuntimeVersion{Version: strconv.Itoa(version)}})
	case o.namespace == "" || o.id == "":
		return errors.New("-namespace and -id are required: this program is started by containerd")
	}
	switch o.action {
	case "start":
		return o.start(ctx)
	case "delete":
		return o.delete()
	case "":
		return o.serve(ctx)
	}
	return fmt.Errorf("unknown action %q", o.action)
}

func answer(m proto.Message) error {
	raw, err := proto.Marshal(m)
	if err == nil {
		_, err = os.Stdout.Write(raw)
	}
	return err
}

// start starts the shim of an anchor. The working directory is the anchor's bundle.
func (o *options) start(ctx context.Context) (err error) {
	raw, err := os.ReadFile("config.json")
	if err != nil {
		return err
	}
	p, err := plan.Parse(raw)
	if err != nil {
		return err
	}
	if !p.Anchor {
		return fmt.Errorf("container %s %s", o.id, plan.NoShim)
	}
	address, err := o.socket()
	if err != nil {
		return err
	}
	listener, err := listen(strings.TrimPrefix(address, "unix://"))
	if err != nil {
		return err
	}
	defer listener.Close()
	defer func() {
		if err != nil {
			_ = os.Remove(strings.TrimPrefix(address, "unix://"))
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	// Sandboxes run without the profile where it cannot be loaded; the agent reports that.
	if err := apparmor.Write(filepath.Dir(self), apparmor.Local().Load(ctx)); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Name, err) // containerd logs it
	}
	cmd := exec.CommandContext(ctx, self, "-namespace", o.namespace, "-id", o.id, "-address", o.address)
	cmd.Env = append(cmd.Environ(), "GOMAXPROCS=2", "GOGC=40")
	cmd.ExtraFiles = []*os.File{listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := place(cmd.Process.Pid, p.ShimCgroup); err != nil {
		return errors.Join(err, cmd.Process.Kill())
	}
	// The older form, which newer versions of containerd understand as well.
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"version": version, "address": address, "protocol": "ttrpc"})
}

// place moves a new shim into its cgroup, and makes the kernel kill it later than its containers and earlier than containerd.
func place(pid int, group string) error {
	if group != "" {
		tree, err := cgroup.Open(cgroupRoot)
		if err != nil {
			return err
		}
		if err := tree.AttachShares(group, pid); err != nil {
			return err
		}
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", os.Getppid()))
	if err != nil {
		return err
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		return err
	}
	err = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.Itoa(min(score+1, 1000))), 0)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}

// socketPrefix begins the name of the socket of each shim of ours.
const socketPrefix = "fsb-"

// socket returns the address of the shim: in the directory that containerd says, or in the one that it has always been in.
func (o *options) socket() (string, error) {
	input, err := io.ReadAll(io.LimitReader(os.Stdin, maxInput))
	if err != nil {
		return "", err
	}
	dir := "/run/containerd/s"
	var params bootapi.BootstrapParams
	if proto.Unmarshal(input, &params) == nil && params.GetInstanceID() == o.id && params.GetSocketDir() != "" {
		dir = params.GetSocketDir()
	}
	sum := sha256.Sum256([]byte(filepath.Join(o.address, o.namespace, o.id)))
	return fmt.Sprintf("unix://%s/%s%x", dir, socketPrefix, sum[:30]), nil // as long as containerd expects
}

func listen(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	// The id of an anchor is never used twice, so that a socket of this name is what a shim has left that could not end in order.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	return l.File()
}

// delete removes what is left of a container whose shim is gone. The working directory is its bundle.
func (o *options) delete() error {
	raw, err := os.ReadFile("config.json")
	if err != nil {
		return err
	}
	p, err := plan.Parse(raw)
	switch {
	case err != nil:
	case p.Anchor:
		err = removeSocket()
	default:
		var tree *cgroup.Tree
		if tree, err = cgroup.Open(cgroupRoot); err == nil {
			err = task.Remove(tree, p.Cgroup)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Name, err) // containerd logs it
	}
	return answer(&taskv3.DeleteResponse{ExitStatus: 128 + uint32(unix.SIGKILL), ExitedAt: timestamppb.New(time.Now())})
}

// removeSocket removes the socket of a shim that could not do that itself. containerd keeps its address in the bundle.
func removeSocket() error {
	raw, err := os.ReadFile("bootstrap.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var params bootapi.BootstrapResult
	if err := json.Unmarshal(raw, &params); err != nil {
		return fmt.Errorf("reading the address of the shim: %w", err)
	}
	path, ok := strings.CutPrefix(params.GetAddress(), "unix://")
	if !ok {
		return nil
	}
	conn, err := net.Dial("unix", path) //nolint:noctx // it does not wait
	if err == nil {
		return conn.Close() // the shim is about to end, and removes it
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return os.Remove(path)
	}
	return nil
}
