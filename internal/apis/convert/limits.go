package convert

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

// resourcePids is the name of the limit on processes, for which Kubernetes has no resource name.
const resourcePids corev1.ResourceName = "pids"

// LimitsToProto converts limits. It returns nil if there are none.
func LimitsToProto(r *v1alpha1.SandboxResources) *sandboxv1.ResourceLimits {
	if r == nil || len(r.Limits) == 0 {
		return nil
	}
	pids := r.Limits[resourcePids]
	return &sandboxv1.ResourceLimits{
		CpuMillis: r.Limits.Cpu().MilliValue(), MemoryBytes: r.Limits.Memory().Value(), Pids: pids.Value(),
	}
}

// LimitsFromProto converts limits. It returns nil if there are none.
func LimitsFromProto(l *sandboxv1.ResourceLimits) *v1alpha1.SandboxResources {
	out := corev1.ResourceList{}
	if l.GetCpuMillis() > 0 {
		out[corev1.ResourceCPU] = *resource.NewMilliQuantity(l.GetCpuMillis(), resource.DecimalSI)
	}
	if l.GetMemoryBytes() > 0 {
		out[corev1.ResourceMemory] = *resource.NewQuantity(l.GetMemoryBytes(), resource.BinarySI)
	}
	if l.GetPids() > 0 {
		out[resourcePids] = *resource.NewQuantity(l.GetPids(), resource.DecimalSI)
	}
	if len(out) == 0 {
		return nil
	}
	return &v1alpha1.SandboxResources{Limits: out}
}

// Effective returns the limits in force of a sandbox of a pool. A pool that is not known, nil, sets none.
func Effective(spec *sandboxv1.ResourceLimits, pool *v1alpha1.SandboxPool) *sandboxv1.ResourceLimits {
	defaults, maximum := poolLimits(pool)
	l := limitsOf(spec).Effective(defaults, maximum)
	return &sandboxv1.ResourceLimits{CpuMillis: l.CPUMillis, MemoryBytes: l.MemoryBytes, Pids: l.PIDs}
}

// CheckLimits refuses limits above the pool's maximum. Its error is an InvalidField that names the fields of spec.resources.
func CheckLimits(spec *sandboxv1.ResourceLimits, pool *v1alpha1.SandboxPool) error {
	_, maximum := poolLimits(pool)
	return limitsOf(spec).Check("spec.resources", maximum)
}

func poolLimits(pool *v1alpha1.SandboxPool) (defaults, maximum resources.Limits) {
	if pool == nil {
		return defaults, maximum
	}
	return limitsOf(LimitsToProto(pool.Spec.SandboxResources)), limitsOf(LimitsToProto(pool.Spec.MaxSandboxResources))
}

func limitsOf(l *sandboxv1.ResourceLimits) resources.Limits {
	return resources.Limits{CPUMillis: l.GetCpuMillis(), MemoryBytes: l.GetMemoryBytes(), PIDs: l.GetPids()}
}
