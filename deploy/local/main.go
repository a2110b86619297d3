// Command fsb-local runs a real single-node Kubernetes on one Linux machine, for Fast Sandbox.
//
// It is one multi-call binary: called (through a link, or by its first argument) as etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler, kubelet, kube-proxy or kubectl it is exactly that upstream program,
// otherwise it is the tool that brings the cluster up and down.
package main

import (
	"os"
	"path/filepath"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cmd"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/kube"
)

func main() {
	if run, args := pick(os.Args); run != nil {
		os.Args = args
		os.Exit(run())
	}
	os.Exit(cmd.Execute(os.Args[1:]))
}

// pick finds the upstream program that argv asks for, by the name it was called or by its first argument, and the argv
// that this program shall see. It returns nil when argv is for fsb-local itself.
func pick(argv []string) (func() int, []string) {
	if len(argv) == 0 {
		return nil, nil
	}
	if run := kube.Program(filepath.Base(argv[0])); run != nil {
		return run, argv
	}
	if len(argv) > 1 {
		if run := kube.Program(argv[1]); run != nil {
			return run, argv[1:]
		}
	}
	return nil, nil
}
