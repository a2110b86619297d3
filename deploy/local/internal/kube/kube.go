// Package kube holds the entry points of the upstream programs that fsb-local carries inside itself: etcd, the
// Kubernetes components and kubectl. It adds nothing to them and is the only package that imports k8s.io/kubernetes,
// so that everything else compiles and tests in seconds.
//
// A program owns its process: it reads os.Args, may install signal handlers and may exit. Call one, once, from main.
package kube

import (
	"context"
	"os"
	_ "time/tzdata" // time zones of CronJobs, as upstream's mains have it

	"github.com/spf13/cobra"
	etcdmain "go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubectl's authentication plugins
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // version metric
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Program returns the upstream program of that name, or nil when there is none. The returned function runs it with
// os.Args to its end and gives its exit code.
func Program(name string) func() int {
	switch name {
	case "etcd":
		return runEtcd
	case "kubectl":
		return runKubectl
	case "kube-apiserver":
		return component(func() *cobra.Command { return apiserver.NewAPIServerCommand() })
	case "kube-controller-manager":
		return component(controllermanager.NewControllerManagerCommand)
	case "kube-scheduler":
		return component(func() *cobra.Command { return scheduler.NewSchedulerCommand() })
	case "kubelet":
		// The kubelet installs its own signal handler; a second one from cobra's context would panic.
		return component(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) })
	case "kube-proxy":
		return component(proxy.NewProxyCommand)
	default:
		return nil
	}
}

func component(build func() *cobra.Command) func() int {
	return func() int { return cli.Run(build()) }
}

func runEtcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func runKubectl() int {
	// As upstream's main: -v must count already while the command tree is built.
	_, _ = logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}
